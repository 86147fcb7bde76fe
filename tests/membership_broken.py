"""What a model says when something happens that must not."""


class Broken(AssertionError):
    """Something that must never be."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)
