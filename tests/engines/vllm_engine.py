"""A real vLLM on the CPU as a process of its own, driven over a pipe.

    with Engine(model_dir, tmp_path / "log", kv_transfer_config={...}) as engine:
        (answer,) = engine.generate([tokens], max_tokens=8)

The engine lives in the virtual environment that `make vllm` made and imports this repository's
code. float32 and eager, so that a hit's tokens are those of a cold prompt. What a prompt costs in
seconds says little on a busy machine: look at `Answer.cached` and at `metrics`.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from tierkv_connectors.models import default_cache

ROOT = Path(__file__).parents[2]
ROOTS = (ROOT, ROOT / "codecs", ROOT / "connectors", ROOT / "service")
PROGRAM = Path(__file__).with_name("vllm_program.py")

BLOCK = 32  # the least that vLLM's CPU kernels take
START_S = 600.0
CALL_S = 300.0
LOG_LINES = 60

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,  # without it there are no metrics
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 23,000 tokens of SmolLM2 in float32
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


STARTED: list["Engine"] = []
"""All engines of this run, the latest last: failures print the end of its log (`conftest.py`)."""


class EngineError(Exception):
    """The engine said no, said nothing, or is gone."""


class Answer(NamedTuple):
    """`cached` counts prompt tokens that were not computed: hits of vLLM and of its connector.

    `told` is what the connector says of the request.
    """

    tokens: list[int]
    cached: int
    ttft_s: float
    finish: str
    told: dict[str, Any] | None


def directory() -> Path:
    """Return where `make vllm` puts the engine: VLLM of the environment is its version."""
    named = os.environ.get("TIERKV_VLLM_DIR")
    version = os.environ.get("VLLM", "0.32.0")
    return Path(named) if named else default_cache().parent / f"vllm-{version}"


def python() -> Path:
    """Return the interpreter of vLLM's virtual environment."""
    return directory() / "bin" / "python"


def environment() -> dict[str, str]:
    """Return what vLLM needs to find: this repository's code, and nothing on the network."""
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, ROOTS))}


def needs_vllm(least: tuple[int, ...] = (), why: str = "") -> None:
    """Skip the calling test where there is no vLLM, with the reason that `make vllm` gave.

    Or where it is older than `least`, with the reason `why`.
    """
    home = directory()
    lock = home.with_name(f"{home.name}.lock")
    if lock.is_file():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # `make test` may still be installing it
    if not (home / "stamp").is_file():
        reason = home.with_name(f"{home.name}.why")
        said = reason.read_text().strip() if reason.is_file() else "`make vllm` installs it"
        pytest.skip(f"vLLM is not installed: {said}")
    if version() < least:
        pytest.skip(f"vLLM is older than {'.'.join(map(str, least))}: {why}")


def version() -> tuple[int, ...]:
    """Return the version of vLLM that is installed, 0.32.0 as (0, 32, 0)."""
    number, *_ = (directory() / "stamp").read_text().split()
    return tuple(map(int, number.split(".")))


class Engine:
    """One engine process; start again after `kill` or `stop` with `start`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer_config: Mapping[str, Any] | None = None,
        more_environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Take a model and options of vLLM.

        Args:
            model: its directory.
            log: a file, appended to.
            kv_transfer_config: none: no connector.
            more_environment: of the engine's processes; VLLM_ENABLE_V1_MULTIPROCESSING=0 makes it
                one process, which starts in half the time.
            options: of vLLM's LLM, over `OPTIONS`.
        """
        needs_vllm()
        self.log = log
        self._options = {"model": str(model)} | OPTIONS | options
        if kv_transfer_config is not None:
            self._options["kv_transfer_config"] = dict(kv_transfer_config)
        self._environment = os.environ | environment() | dict(more_environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        STARTED.append(self)
        command = [python(), PROGRAM]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # a group of its own, so that all of it can be killed
            )
        try:
            self.call("start", START_S, **self._options)
        except EngineError:
            self.kill()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        extra: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[Answer]:
        """Run prompts at once, greedily.

        Args:
            prompts: token ids.
            max_tokens: of every answer; end-of-text does not end one.
            extra: more of each prompt, such as `cache_salt`.
            sampling: more of SamplingParams, for all.
            more: of the program's `generate`, such as `lora`.
        """
        fields = list(extra) or [{}] * len(prompts)
        asked = [
            {"prompt_token_ids": list(prompt), **one}
            for prompt, one in zip(prompts, fields, strict=True)
        ]
        params = {"max_tokens": max_tokens, **(sampling or {})}
        answers = self.call("generate", prompts=asked, sampling=[params] * len(asked), **more)
        return [Answer(**answer) for answer in answers]

    def metrics(self, prefix: str = "vllm:external_prefix_cache") -> dict[str, float]:
        """Return counters and gauges by name; labels but the engine's are part of the name."""
        found: dict[str, float] = self.call("metrics", prefix=prefix)
        return found

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache; with `connector` the connector's store too."""
        return bool(self.call("reset_prefix_cache", reset_connector=connector))

    def call(self, action: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Send one request and wait for its answer. Raises: EngineError."""
        process = self._process
        assert process is not None, "the engine was not started"
        assert process.stdin is not None
        assert process.stdout is not None
        request = json.dumps({"do": action, **arguments}) + "\n"
        try:
            process.stdin.write(request.encode())
            process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"{action}: the engine is gone") from None
        # An answer is one line, written at once: readline does not wait for long.
        answers = select.poll()  # which takes descriptors of any number
        answers.register(process.stdout, select.POLLIN)
        ready = answers.poll(timeout_s * 1e3)
        line = process.stdout.readline() if ready else b""
        if not line:
            what = "ended" if ready else f"gave no answer in {timeout_s:.0f} s"
            raise EngineError(f"{action}: the engine {what}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{action}: {answer['error']}")
        return answer["result"]

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the engine as its user would, then whatever is left of it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End all of the engine's processes with SIGKILL, as a crash would."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def said(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {self.log}", *lines[-LOG_LINES:]])
