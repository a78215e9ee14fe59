"""The one place of this package that starts threads."""

import threading
from collections.abc import Callable


def start(name: str, run: Callable[[], None]) -> threading.Thread:
    """Run `run` in a thread that never keeps the process alive. Raises: RuntimeError: no more."""
    thread = threading.Thread(target=run, name=f"tierkv-{name}", daemon=True)
    thread.start()
    return thread
