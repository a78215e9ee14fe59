"""Apart: requests that the engine's own prefix cache would let share blocks, and must not.

It serves what was loaded or computed for one request to the next without asking us. It knows no
classes of fidelity, and an adapter by the name that it was given and its path at most, so another
content under that name would find blocks of the first one, which we would then store as its own.
"""

import secrets

from tierkv.fidelity import Fidelity
from tierkv_connectors.vllm.engine import Request


class Apart:
    """Names of blocks in the engine's prefix cache, for an engine of one class.

    What needs none keeps the names that vLLM gives, by which routers know blocks. Others get a
    salt, which no client can know; our own keys are made without it.
    """

    def __init__(self, fidelity: Fidelity) -> None:
        self._fidelity = fidelity
        self._mark = secrets.token_hex(16)
        self._loras: dict[str, str] = {}
        """The content that vLLM's own names stand for, by the adapter's name; "": none."""

    def separate(self, request: Request, fidelity: Fidelity, lora: str) -> None:
        """Give a request's blocks names of their own where vLLM's may stand for others.

        Args:
            request: before the engine has looked for its blocks.
            fidelity: that it is served at least.
            lora: names the content of its LoRA adapter; "": it has none.
        """
        marks = [] if fidelity == self._fidelity else [fidelity.name]
        if lora:
            first = self._loras.setdefault(request.lora_request.lora_name, lora)
            marks += [] if first == lora else [lora]
        if marks:
            request.cache_salt = " ".join([request.cache_salt or "", self._mark, *marks])
            request.block_hashes.clear()
            request.update_block_hashes()

    def left_alone(self, request: Request) -> None:
        """Hear of a request whose content has no name: its adapter's blocks may be anything."""
        named = getattr(request, "lora_request", None)
        if named is not None:
            self._loras[named.lora_name] = ""
