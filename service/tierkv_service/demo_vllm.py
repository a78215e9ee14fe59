"""The demo's engine on vLLM: vLLM's own HTTP server, asked what the order says.

This process needs no vLLM: the server runs in a Python that has it. Where the tokens of an answer
came from is what the server's metrics say of it.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tierkv.errors import TierKVError, unavailable
from tierkv_connectors.vllm.kept import block_tokens
from tierkv_service.demo_engine import (
    FLUSH_S,
    NEW_TOKENS,
    WARM_UP_TOKENS,
    Answer,
    Durable,
    Order,
    Ready,
    Words,
    tell,
)
from tierkv_service.demo_processes import Processes, copies, stat_of, stop, until

HOST = "127.0.0.1"
NAME = "smollm2"
ENGINE_TOKENS = 32  # of a block: the least that vLLM's CPU kernels take
START_S = 300.0
ANSWER_S = 300.0
STOP_S = 20.0
OWN = "vLLM's own cache"

NEEDED = ("vllm", "msgspec", "numpy", "xxhash", "zstandard")
PACKAGES = ("tierkv", "tierkv_codecs", "tierkv_connectors")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
SOURCES = {"device": OWN, "host": "host", "disk": "nvme", "external_unspecified": "redis"}
"""Our name of what vLLM's metrics call the place that tokens came from."""

_LOOK = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
_COUNTED = re.compile(
    r'^vllm:prompt_tokens_cached_by_source_total\{.*\bsource="(\w+)".*\} (\S+)$', re.MULTILINE
)
_DATA = b"data: "
_SAID = 200


class Completion(NamedTuple):
    """What the server answered to one prompt."""

    tokens: list[int]
    ttft_s: float


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


def find(python: str) -> str:
    """Return the path of a Python that has vLLM and what tierkv needs beside it.

    Raises: TierKVError (unavailable): this one has not.
    """
    fix = "`make vllm` installs it, and --engine-python names the Python that has it"
    path = shutil.which(python)
    if path is None:
        raise unavailable(f"no vLLM: there is no program {python}; {fix}")
    looked = subprocess.run(
        [path, "-P", "-c", _LOOK, *NEEDED], capture_output=True, text=True, check=False
    )
    missing = looked.stdout.split()
    if looked.returncode or "vllm" in missing:
        raise unavailable(f"{python} has no vLLM: {fix}{looked.stderr[-_SAID:]}")
    if missing:
        raise unavailable(f"{python} has vLLM, but tierkv needs {', '.join(missing)} there too")
    return str(Path(path).absolute())


def command(python: str, model: str, port: int, sidecar: str = "") -> list[str]:
    """Return the command of a server; a `sidecar` at the usual place need not be named."""
    transfer: dict[str, Any] = {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv_connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if sidecar:
        transfer["kv_connector_extra_config"] = {"socket": sidecar}
    options = {
        "model": model,
        "served-model-name": NAME,
        "dtype": "float32",  # a prefix that was computed and one that was loaded: the same tokens
        "block-size": str(ENGINE_TOKENS),
        "max-model-len": "4096",
        "max-num-batched-tokens": "4096",  # a prompt at once: in pieces, computing takes longer
        "host": HOST,
        "port": str(port),
        "kv-transfer-config": json.dumps(transfer),
    }
    # vLLM's console script does not start where its distribution has another name, as for the CPU.
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    return words + [word for name, value in options.items() for word in (f"--{name}", value)]


def request(prompt: list[int] | str, new_tokens: int) -> dict[str, Any]:
    """Return the body of a request."""
    return {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }


def by_hand(python: str, model: str, port: int = 8000) -> list[str]:
    """Return the lines of a shell that do what the demo does."""
    body = json.dumps(request("PROMPT", NEW_TOKENS))
    settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    url, header = f"http://{HOST}:{port}/v1/completions", "Content-Type: application/json"
    return [
        "tierkv serve",
        shlex.join(["env", *_importable(), *settings, *command(python, model, port)]),
        shlex.join(["curl", "-N", url, "-H", header, "-d", body]),
    ]


def _importable() -> list[str]:
    """Return what lets another Python import a checkout; elsewhere tierkv is to be installed."""
    roots = dict.fromkeys(str(_location(name).parent) for name in PACKAGES)
    roots.pop(sysconfig.get_path("purelib"), None)
    return [f"PYTHONPATH={os.pathsep.join(roots)}"] if roots else []


def _location(name: str) -> Path:
    return Path(str(import_module(name).__file__)).parent


def tokens_of(line: bytes) -> list[int]:
    """Return the new tokens in one line of a streamed answer.

    Raises: TierKVError (unavailable): it tells of an error.
    """
    data = line.strip().removeprefix(_DATA)
    if not line.startswith(_DATA) or data == b"[DONE]":
        return []
    piece = msgspec.json.decode(data, type=_Piece)
    if piece.error is not None:
        raise unavailable(f"vLLM ended an answer: {piece.error.get('message', piece.error)}")
    return [token for choice in piece.choices for token in choice.token_ids or ()]


def sources_of(metrics: str) -> Counter[str]:
    """Return how many prompt tokens came from where since the server started."""
    found = Counter[str]()
    for source, tokens in _COUNTED.findall(metrics):
        found[SOURCES.get(source, source)] += int(float(tokens))
    return found


def block_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of a stored block in float32, of a model with this `config.json`."""
    heads: int = config["num_hidden_layers"] * config["num_key_value_heads"]
    return 2 * heads * int(config["head_dim"]) * 4 * block_tokens(ENGINE_TOKENS, 0)


def environment(folder: Path) -> dict[str, str]:
    """Return the server's environment, in which it finds tierkv and nothing else of this Python.

    Args:
        folder: gets links to tierkv's packages, which may lie among many others, and what vLLM
            leaves in temporary files.
    """
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    for name in PACKAGES:
        with contextlib.suppress(FileExistsError):
            (packages / name).symlink_to(_location(name))
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(folder)}
    return os.environ | ENVIRONMENT | ours


class Server:
    """A running vLLM server. Raises: TierKVError (unavailable): it does not start."""

    def __init__(self, processes: Processes, order: Order) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port: int = probe.getsockname()[1]
        name = f"vllm-{self._port}"
        words = command(order.vllm, order.model, self._port, order.socket)
        with processes.log(name).open("ab") as log:
            self._process = processes.start(
                name,
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                env=environment(processes.folder),
            )
        processes.callback(self._end)
        if not until(self._answers, self._process, START_S):
            raise unavailable(f"vLLM's server did not start:\n{processes.said(name)}")

    def complete(self, prompt: list[int], new_tokens: int, **more: object) -> Completion:
        """Let it answer one prompt.

        Raises: TierKVError (unavailable): it refuses, or tells of an error.
        """
        body = msgspec.json.encode(request(prompt, new_tokens) | more)
        with closing(HTTPConnection(HOST, self._port, timeout=ANSWER_S)) as connection:
            started = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = _good(connection.getresponse())
            tokens: list[int] = []
            ttft_s = 0.0
            while line := response.readline():
                new = tokens_of(line)
                if new and not tokens:
                    ttft_s = time.perf_counter() - started
                tokens += new
        return Completion(tokens, ttft_s)

    def sources(self) -> Counter[str]:
        """Return how many prompt tokens came from where since it started."""
        return sources_of(self._get("/metrics"))

    def _get(self, path: str) -> str:
        with closing(HTTPConnection(HOST, self._port, timeout=ANSWER_S)) as connection:
            connection.request("GET", path)
            return _good(connection.getresponse()).read().decode()

    def _answers(self) -> bool:
        try:
            self._get("/health")
        except (OSError, HTTPException, TierKVError):
            return False
        return True

    def _end(self) -> None:
        stop(self._process, STOP_S)
        with contextlib.suppress(ProcessLookupError):  # its own processes may outlive it
            os.killpg(self._process.pid, signal.SIGKILL)


def _good(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:  # noqa: PLR2004 -- OK
        said = response.read().decode(errors="replace")
        raise unavailable(f"vLLM answered {response.status}: {said}")
    return response


class Engine:
    """A server, and the tokenizer of its model."""

    def __init__(self, processes: Processes, order: Order) -> None:
        started = time.perf_counter()
        self._sidecar = Path(order.socket)
        self._words = Words(order.model)
        self._server = Server(processes, order)
        self._server.complete(list(range(WARM_UP_TOKENS)), 1)
        config = json.loads(Path(order.model, "config.json").read_text())
        self._tokens = block_tokens(ENGINE_TOKENS, 0)
        seconds = time.perf_counter() - started
        tell(Ready(seconds=seconds, block_tokens=self._tokens, block_bytes=block_bytes(config)))

    def answer(self, name: str, prompt: list[int], **more: object) -> Answer:
        """Answer a prompt and tell of it."""
        before = self._server.sources()
        done = self._server.complete(prompt, NEW_TOKENS, **more)
        sources = self._server.sources() - before
        answer = Answer(
            name=name,
            prompt=prompt,
            tokens=done.tokens,
            text=self._words.text(done.tokens),
            ttft_s=done.ttft_s,
            reused=sources.total(),
            sources=dict(sources),
        )
        tell(answer)
        return answer

    def converse(self) -> None:
        """Ask every question about the document, then the last one again as if nobody had."""
        prompt = self._words.converse(self.answer)
        # A salt of its own: neither vLLM nor tierkv has a prefix of it.
        self.answer(
            "cold", prompt, cache_salt="cold", kv_transfer_params={"tierkv": {"store": False}}
        )
        blocks = len(prompt) // self._tokens
        deadline = time.monotonic() + FLUSH_S
        while (kept := copies(stat_of(self._sidecar))) < blocks and time.monotonic() < deadline:
            time.sleep(0.1)
        tell(Durable(blocks=min(kept, blocks), of=blocks))


def main() -> int:
    """Do what the order on standard input says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        with Processes(Path(order.socket).parent) as processes:
            engine = Engine(processes, order)
            if order.prompt:
                engine.answer(order.name, order.prompt)
            else:
                engine.converse()
    except (TierKVError, HTTPException, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
