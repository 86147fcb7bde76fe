"""A rank whose launcher is on another machine: no memory to share with it, no descriptor that closes when it dies.

Owns the entry point that such a launcher calls; `nobiru.engine.heart` takes the place of what is missing. Everything
else is as in `nobiru.engine.rank`.
"""

from __future__ import annotations

import logging

import msgspec
import zmq

from nobiru.engine.heart import Heart
from nobiru.engine.rank import connect, serve
from nobiru.engine.rank_spec import RankSpec


def main(spec: bytes, *, host: str, num_cpus: int) -> int:
    """Called in a thread; the exit code. `host` is this machine's address, as others reach it.

    The rank's workers share the CPUs. The process is the launcher's to end, and its signals are left alone.
    """
    described = msgspec.json.decode(spec, type=RankSpec)
    num_threads = max(1, num_cpus // described.engine.tensor_parallel_size)
    engine = msgspec.structs.replace(described.engine, num_threads=num_threads)
    place = msgspec.structs.replace(described.place, host=host)
    described = msgspec.structs.replace(described, place=place, engine=engine)
    logging.basicConfig(level=described.log_level.upper(), format=f"{described.rank_id} %(levelname)s %(message)s")
    assert described.heart is not None
    heart = Heart(described.heart, described.rank_id)
    heart.start()
    context = zmq.Context()
    socket = connect(context, described, described.rank_id)
    exit_code = serve(described, context, socket, heart)
    socket.close()
    context.term()
    return exit_code
