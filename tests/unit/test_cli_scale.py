"""`nobiru scale` and `nobiru status` against a scripted server: requests, display, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from nobiru.cli import scale as scale_module
from nobiru.cli import status as status_module
from nobiru.cli.http import Server
from nobiru.cli.main import main
from nobiru.elastic.membership import Operation
from nobiru.elastic.records import OperationRecord
from nobiru.errors import ConfigError, NobiruError, UnavailableError

PATH = "/elastic/operations"
ONE = f"{PATH}/op-1"


class Scripted:
    """A server whose answers are `script`: what to call or to answer, in order, for a method and path; the last stays.

    An answer is a status with a document, or with bytes; `asked` is what came.
    """

    def __init__(self) -> None:
        self.script: dict[tuple[str, str], list[Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: list[str | None] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                scripted.asked.append((self.command, self.path, json.loads(body) if body else None))
                scripted.keys.append(self.headers.get("authorization"))
                answers = scripted.script[self.command, self.path]
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                status, content = answer() if callable(answer) else answer
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("location", "/here")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def asked_of(self, method: str) -> list[Any]:
        return [body if method == "POST" else path for each, path, body in self.asked if each == method]


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join(10)
    server.http.server_close()


@pytest.fixture(autouse=True)
def _quick_and_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NOBIRU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(scale_module, "POLL_S", 0.01)


def document(*phases: str, error: str | None = None, **fields: Any) -> dict[str, Any]:
    """As the server would show an operation that has gone through `phases`, a second each."""
    operation = Operation(number=1, origin="user", size=4, error=error)
    target = {"data_parallel_size": 4, "remove_ranks": [], "replace_ranks": []}
    record = OperationRecord(operation=operation, operation_id="op-1", from_epoch=3, target=target, **fields)
    for second, phase in enumerate(phases):
        operation.phase = phase  # type: ignore[assignment]
        record.note_phase(1000.0 + second)
    return record.document(1000.5 + len(phases) - 1)


STATES = {"r0": "serving", "r1": "serving", "r2": "launching"}
PREPARING = document("preparing", ranks=STATES)
COMMITTING = document("preparing", "draining", "committing", ranks=STATES, bytes_moved=3_000_000)
PHASES = ("preparing", "draining", "committing", "settling", "done")
DONE = document(*PHASES, ranks=STATES, to_epoch=4, pause_s=0.0125, bytes_moved=3_000_000)
CANCELLED = document("preparing", "rolled_back", error="cancelled", ranks=STATES)


def refusal(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "-", "param": None, "code": code}}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# ---- scale -----------------------------------------------------------------------------------------------------------


def test_an_operation_is_followed_to_its_end(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.script = {("POST", PATH): [(202, PREPARING)], ("GET", ONE): [(200, COMMITTING), (200, DONE)]}
    assert run("scale", "4", "--url", scripted.url + "/v1/") == 0
    assert scripted.asked == [("POST", PATH, {"data_parallel_size": 4}), ("GET", ONE, None), ("GET", ONE, None)]
    shown = capsys.readouterr()
    assert shown.out == "4 ranks serve, epoch 3 -> 4, paused 12.5 ms, 3.0 MB read, 4.00 s in all\n"
    assert shown.err.splitlines() == [
        "nobiru:    0.00 s  preparing (r0 serving, r1 serving, r2 launching)",
        "nobiru:    1.00 s  draining",
        "nobiru:    2.00 s  committing (r0 serving, r1 serving, r2 launching)",
        "nobiru:    3.00 s  settling",
        "nobiru:    4.00 s  done (r0 serving, r1 serving, r2 launching)",
    ]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--remove", "r3", "--remove", "r4"], {"remove_ranks": ["r3", "r4"]}),
        (["--replace", "r1", "--no-drain"], {"replace_ranks": ["r1"], "drain": False}),
        (["2", "--drain"], {"data_parallel_size": 2, "drain": True}),
        (
            ["2", "--drain-timeout-s", "30", "--deadline-s", "60"],
            {"data_parallel_size": 2, "drain": True, "drain_timeout_s": 30, "deadline_s": 60},
        ),
    ],
)
def test_options_become_fields(scripted: Scripted, arguments: list[str], asked: dict[str, Any]) -> None:
    scripted.script = {("POST", PATH): [(202, DONE)]}
    assert run("scale", *arguments, "--url", scripted.url) == 0
    assert scripted.asked_of("POST") == [asked]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["0"],
        ["two"],
        ["2", "--remove", "r1"],
        ["--remove", "r1", "--replace", "r2"],
        ["2", "--no-drain", "--drain-timeout-s", "3"],
        ["2", "--url", "ftp://127.0.0.1"],
        ["2", "--url", "127.0.0.1:8000"],
    ],
)
def test_bad_options_ask_nothing(scripted: Scripted, arguments: list[str]) -> None:
    assert run("scale", *(["--url", scripted.url] if "--url" not in arguments else []), *arguments) == 2
    assert scripted.asked == []


def test_what_is_undone_is_a_failure_with_its_cause(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    undone = document("preparing", "rolled_back", error="the new rank r2 died", ranks=STATES)
    scripted.script = {("POST", PATH): [(202, PREPARING)], ("GET", ONE): [(200, undone)]}
    assert run("scale", "4", "--url", scripted.url) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == "nobiru: op-1 is undone: the new rank r2 died"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 2), (409, 1), (401, 1), (503, 1), (500, 1)],
)
def test_refusals(scripted: Scripted, capsys: pytest.CaptureFixture[str], status: int, code: int) -> None:
    scripted.script = {("POST", PATH): [(status, refusal("it cannot be", "some_code"))]}
    assert run("scale", "4", "--url", scripted.url) == code
    assert "it cannot be" in capsys.readouterr().err
    assert len(scripted.asked) == 1


def test_the_key_comes_from_the_option_or_the_environment(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.script = {("POST", PATH): [(202, DONE)]}
    run("scale", "4", "--url", scripted.url)
    monkeypatch.setenv("NOBIRU_API_KEY", "reader")
    run("scale", "4", "--url", scripted.url)
    monkeypatch.setenv("NOBIRU_ADMIN_KEY", "first,second")
    run("scale", "4", "--url", scripted.url)
    run("scale", "4", "--url", scripted.url, "--admin-key", "explicit")
    assert scripted.keys == [None, "Bearer reader", "Bearer first", "Bearer explicit"]


def interrupting(times: int, answer: dict[str, Any]) -> Callable[[], tuple[int, dict[str, Any]]]:
    """An answer that comes after so many Ctrl-C at the command."""

    def call() -> tuple[int, dict[str, Any]]:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return 200, answer

    return call


def test_an_interrupt_cancels_and_waits(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    scripted.script = {
        ("POST", PATH): [(202, PREPARING)],
        ("GET", ONE): [interrupting(1, PREPARING), (200, PREPARING), (200, PREPARING), (200, CANCELLED)],
        ("DELETE", ONE): [(200, PREPARING)],
    }
    assert run("scale", "4", "--url", scripted.url) == 1
    assert scripted.asked_of("DELETE") == [ONE], "once"
    assert "is undone: cancelled" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_after_the_commit_changes_nothing(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.script = {
        ("POST", PATH): [(202, PREPARING)],
        ("GET", ONE): [interrupting(1, COMMITTING), (200, COMMITTING), (200, DONE)],
        ("DELETE", ONE): [(409, refusal("op-1 is settling; it cannot be cancelled any more", "conflict"))],
    }
    assert run("scale", "4", "--url", scripted.url) == 0
    assert scripted.asked_of("DELETE") == [ONE]
    assert "cannot be cancelled any more" in capsys.readouterr().err


def test_a_second_interrupt_leaves(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = interrupting(1, PREPARING), interrupting(1, PREPARING)
    scripted.script = {
        ("POST", PATH): [(202, PREPARING)],
        ("GET", ONE): [first, (200, PREPARING), second, (200, PREPARING)],
        ("DELETE", ONE): [(200, PREPARING)],
    }
    assert run("scale", "4", "--url", scripted.url) == 130
    assert "left; op-1 goes on" in capsys.readouterr().err


def forecast_of(rank: str, role: str, before: int, after: int) -> dict[str, Any]:
    memory = {"before": before, "during": max(before, after), "after": after}
    return {"role": role, "node": "10.0.0.1", "bytes_to_read": 700_000, "memory_bytes": memory}


def test_a_dry_run_follows_nothing(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "members": ["r0", "new-0"],
        "bytes_to_read": 2_000_000,
        "ranks": {
            "r0": forecast_of("r0", "stays", 1_000_000, 1_500_000),
            "r1": forecast_of("r1", "leaves", 1_250_000, 0),
            "new-0": forecast_of("new-0", "joins", 0, 1_750_000),
        },
        "nodes": {"10.0.0.1": {"needed_bytes": 2_250_000, "available_bytes": 9_000_000, "free_bytes": 9_500_000}},
        "expected_pause_seconds": 0.05,
        "num_pauses_measured": 0,
    }
    document = {
        "operation_id": None,
        "phase": "planning",
        "dry_run": True,
        "target": {"data_parallel_size": 2},
        "plan": plan,
        "error": None,
    }
    measured = {**plan, "expected_pause_seconds": 0.02, "num_pauses_measured": 3}
    refused = {**document, "plan": measured, "error": "not enough memory on 10.0.0.1"}
    scripted.script = {("POST", PATH): [(202, document), (202, refused)]}
    assert run("scale", "2", "--dry-run", "--url", scripted.url) == 0
    assert scripted.asked == [("POST", PATH, {"data_parallel_size": 2, "dry_run": True})]
    out = capsys.readouterr().out
    assert "dry run: 2 ranks would serve; 2.0 MB would be read; pause about 50.0 ms (none measured yet)" in out
    (row,) = [line.split() for line in out.splitlines() if "new-0" in line]
    assert row == ["new-0", "joins", "10.0.0.1", "700.0", "kB", "0", "bytes", "1.8", "MB", "1.8", "MB"]
    assert "10.0.0.1: 2.2 MB more are needed, 9.0 MB available" in out
    assert run("scale", "2", "--dry-run", "--url", scripted.url) == 1
    out = capsys.readouterr().out
    assert "pause about 20.0 ms (median of 3 earlier)" in out
    assert "it would be refused: not enough memory on 10.0.0.1" in out


def test_a_server_that_is_late_once_is_not_lost(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    late = (503, refusal("busy", "unavailable"))
    scripted.script = {("POST", PATH): [(202, PREPARING)], ("GET", ONE): [late, (200, DONE)]}
    assert run("scale", "4", "--url", scripted.url) == 0
    monkeypatch.setattr(scale_module, "LOST_S", 0.05)
    scripted.script = {("POST", PATH): [(202, PREPARING)], ("GET", ONE): [late]}
    assert run("scale", "4", "--url", scripted.url) == 1


def test_an_operation_that_never_ends_is_left(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale_module, "AFTER_DEADLINE_S", -0.9)
    scripted.script = {("POST", PATH): [(202, PREPARING)], ("GET", ONE): [(200, PREPARING)]}
    assert run("scale", "4", "--url", scripted.url, "--deadline-s", "1") == 1
    assert "op-1 is preparing after 0.1 s" in capsys.readouterr().err


def test_a_terminal_shows_phases_ranks_and_bytes() -> None:
    written = io.StringIO()
    with scale_module._display(Console(file=written, force_terminal=True, width=80, color_system=None)) as show:
        show(PREPARING)
        show(COMMITTING)
    text = written.getvalue()
    last = text[text.rindex("operation op-1: to 4 ranks") :]
    assert "preparing  " in last
    assert "1.00" in last
    assert "0.50" in last
    assert "r0 serving, r1 serving, r2 launching" in last
    assert "3.0 MB to read" in last


# ---- status ----------------------------------------------------------------------------------------------------------

STATUS: dict[str, Any] = {
    "epoch": 7,
    "desired_size": 3,
    "operation": COMMITTING,
    "placement": {
        "num_experts": 4,
        "slot_capacity": 3,
        "slots": {"r0": [[0, 1, 2], [0, -1, -1]], "r1": [[3, 0, -1], [1, 2, -1]]},
        "version": 5,
        "balancedness": 0.91234,
    },
    "ranks": [
        {"rank_id": "r0", "pid": 4711, "node": "localhost", "state": "serving", "outstanding_tokens": 17},
        {"rank_id": "r1", "pid": None, "node": None, "state": "leaving", "outstanding_tokens": 0},
    ],
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ \n").replace("┃", "│").split("│")]


def test_status_is_a_table(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.script = {("GET", "/elastic/status"): [(200, STATUS)]}
    assert run("status", "--url", scripted.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("   ") == ["epoch 7", "ranks 2 of 3", "experts 4", "balancedness 0.912"]
    assert cells(lines[2]) == ["rank", "pid", "node", "state", "outstanding tokens", "experts per layer"]
    assert cells(lines[4]) == ["r0", "4711", "localhost", "serving", "17", "1 to 3"]
    assert cells(lines[5]) == ["r1", "-", "-", "leaving", "0", "2"]
    assert lines[-1] == "operation op-1 (user): to 4 ranks, committing, for 2.5 s"


def test_status_tells_of_the_autoscaler(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    decision = {
        "time": 0.0,
        "from_ranks": 1,
        "to_ranks": 2,
        "reason": "the wait is long",
        "phase": "done",
        "error": None,
    }
    autoscaler: dict[str, Any] = {
        "min": 1,
        "max": 8,
        "target_wait_s": 2.0,
        "dry_run": False,
        "now": {"action": "hold", "reason": "the wait is low"},
        "last_decision": decision,
        "error": None,
    }
    others = [
        {**autoscaler, "now": None, "last_decision": None, "dry_run": True},
        {**autoscaler, "error": "TypeError: x"},
    ]
    answers = [(200, {**STATUS, "autoscaler": each}) for each in (autoscaler, *others)]
    scripted.script = {("GET", "/elastic/status"): answers}
    shown = []
    for _ in range(3):
        assert run("status", "--url", scripted.url) == 0
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0][-2] == "autoscaler: 1 to 8 ranks, wait 2 s; now hold: the wait is low"
    assert shown[0][-1].startswith("last decision at ")
    assert shown[0][-1].endswith(": 1 -> 2 ranks, done: the wait is long")
    assert shown[1][-1] == "autoscaler: 1 to 8 ranks, wait 2 s, dry run"
    assert shown[2][-1] == "autoscaler: 1 to 8 ranks, wait 2 s; has ended: TypeError: x"


def test_status_of_a_server_without_experts(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"epoch": 0, "ranks": [{**STATUS["ranks"][0], "rank_id": "[red]r0"}]}
    scripted.script = {("GET", "/elastic/status"): [(200, plain)]}
    assert run("status", "--url", scripted.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 0   ranks 1"
    assert cells(lines[4]) == ["[red]r0", "4711", "localhost", "serving", "17"]


def test_status_of_ranks_with_several_workers(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        {**rank, "worker_pids": pids} for rank, pids in zip(STATUS["ranks"], ([4711, 4712], []), strict=True)
    )
    scripted.script = {("GET", "/elastic/status"): [(200, {"epoch": 1, "ranks": [first, second]})]}
    assert run("status", "--url", scripted.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cells(lines[2]) == ["rank", "pid", "worker pids", "node", "state", "outstanding tokens"]
    assert cells(lines[4]) == ["r0", "4711", "4712", "localhost", "serving", "17"]
    assert cells(lines[5])[:3] == ["r1", "-", "-"]


def test_status_as_json(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.script = {("GET", "/elastic/status"): [(200, STATUS)]}
    assert run("status", "--json", "--url", scripted.url) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_watching_ends_with_an_interrupt(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "REFRESH_S", 0.01)
    changed = {**STATUS, "epoch": 8}
    scripted.script = {("GET", "/elastic/status"): [(200, STATUS), (200, changed), interrupting(1, changed)]}
    assert run("status", "--watch", "--json", "--url", scripted.url) == 0
    assert [json.loads(line)["epoch"] for line in capsys.readouterr().out.splitlines()][:2] == [7, 8]


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["scale", "4"], ["status"]])
def test_no_server(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run(*command, "--url", url) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"nobiru: no server answers at {url} (Connection refused); start one with 'nobiru serve', or give its address "
        "with --url"
    )


def test_another_server_is_told_from_ours(scripted: Scripted) -> None:
    scripted.script = {("GET", "/page"): [(200, b"<html>")], ("GET", "/missing"): [(404, b"<html>")]}
    server = Server(scripted.url)
    for path in ("/page", "/missing"):
        with pytest.raises(NobiruError, match="is it") as raised:
            server.get(path)
        assert not isinstance(raised.value, UnavailableError)


def test_redirects_and_proxies_do_not_get_the_key(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    scripted.script = {("GET", "/moved"): [(302, b"")], ("GET", "/here"): [(200, {})]}
    assert Server(scripted.url, "k").get("/here") == {}
    with pytest.raises(NobiruError, match="HTTP 302"):
        Server(scripted.url, "k").get("/moved")
    assert [path for _, path, _ in scripted.asked] == ["/here", "/moved"]


def test_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(UnavailableError, match=r"did not answer in 0.1 s"):
            server.get("/elastic/status")


def test_addresses() -> None:
    assert Server(" https://host:1/v1/ ").url == "https://host:1"
    for url in ("", "host", "http://", "http://h:x", "http://h /", "file:///etc/passwd"):
        with pytest.raises(ConfigError, match="url is"):
            Server(url)
