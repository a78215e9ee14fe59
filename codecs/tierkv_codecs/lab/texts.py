"""Texts: what codecs are calibrated on and what they are evaluated on; never the same document.

English prose, Python's own source and, for evaluation alone, Spanish. Books are shipped in `data/`
(public domain, `data/README.md`); code and reference prose are this Python's standard library (PSF
licence), so they differ a little between Python versions, which `digest` shows. Nothing is fetched.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from tierkv.errors import invalid

PROSE, CODE, SPANISH = "prose", "code", "spanish"

CALIBRATION_TOPICS = (
    "compound", "types", "formatstrings", "typesseq", "assignment", "comparisons", "execmodel",
    "strings", "operator-summary", "import", "calls", "identifiers", "objects",
)  # fmt: skip
"""Chapters of the language reference, as `pydoc` has them."""
EVALUATION_TOPICS = ("specialnames", "debugger", "string-methods", "typesmapping")

CALIBRATION_MODULES = (
    "subprocess", "inspect", "json.decoder", "dataclasses", "http.client", "logging", "functools",
    "email.message", "asyncio.base_events", "enum", "urllib.request", "unittest.case", "pickle",
    "xml.etree.ElementTree", "ast", "collections", "ipaddress", "selectors", "imaplib",
    "mailbox", "concurrent.futures.thread", "typing", "random", "traceback",
)  # fmt: skip
EVALUATION_MODULES = (
    "tarfile", "argparse", "statistics", "threading", "difflib", "configparser", "shutil", "heapq",
)  # fmt: skip


class Document(NamedTuple):
    """One text with its domain; `name` is shown in reports."""

    domain: str
    name: str
    text: str


def calibration_texts() -> tuple[Document, ...]:
    """Return what artifacts are calibrated on when no text is given: English prose and code.

    About 480,000 tokens; documents of all kinds alternate, so a prefix of them is a fair sample.
    """
    prose = _alternate(_shipped(PROSE, "calibration-english.txt"), _topics(CALIBRATION_TOPICS))
    return tuple(_alternate(prose, _modules(CALIBRATION_MODULES)))


def evaluation_texts() -> tuple[Document, ...]:
    """Return what codecs are evaluated on, of which no calibration has seen a word.

    Eight documents or so in each domain, each long enough for four sequences of 1,152 tokens.
    """
    prose = _alternate(_shipped(PROSE, "evaluation-english.txt"), _topics(EVALUATION_TOPICS))
    spanish = _shipped(SPANISH, "evaluation-spanish.txt")
    return (*prose, *_modules(EVALUATION_MODULES), *spanish)


def digest(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of documents in order, as hex."""
    found = hashlib.sha256(b"tierkv.texts.1")
    for document in documents:
        for field in document:
            data = field.encode()
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def _alternate(first: Sequence[Document], second: Sequence[Document]) -> list[Document]:
    """Return both in turn; what is left of the longer one comes last."""
    shorter = min(len(first), len(second))
    mixed = [one for pair in zip(first, second, strict=False) for one in pair]
    return [*mixed, *first[shorter:], *second[shorter:]]


def _shipped(domain: str, file: str) -> list[Document]:
    text = resources.files("tierkv_codecs.lab").joinpath("data", file).read_text(encoding="utf-8")
    documents = []
    for one in text.split("\f"):
        title, _, body = one.partition("\n\n")
        documents.append(Document(domain, title, body))
    return documents


def _topics(names: Sequence[str]) -> list[Document]:
    """Return chapters of the language reference; a Python may lack some that others have."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise invalid(
            "this Python has no pydoc_data, which the lab's prose comes from: install the whole"
            " standard library (Debian: libpython3-stdlib)"
        ) from error
    return [Document(PROSE, f"pydoc {name}", topics[name]) for name in names if name in topics]


def _modules(names: Sequence[str]) -> list[Document]:
    documents = []
    for name in names:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        source = getattr(loader, "get_source", lambda _name: None)(name)
        if source is None:
            raise invalid(
                f"this Python has no source of {name}, which the lab's code comes from: install"
                " the whole standard library (Debian: libpython3-stdlib)"
            )
        documents.append(Document(CODE, f"python {name}", source))
    return documents
