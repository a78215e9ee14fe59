"""`tierkv replay RECORD`: every decision of a live service once more; is it the same?"""

import json
import sys
from pathlib import Path

import typer

from tierkv.record import is_record
from tierkv.simulation.rerun import rerun


def run_record(path: Path, *, as_json: bool) -> None:
    """Print what came of a record and end with status 1 when a decision differs.

    Does nothing with another file.
    """
    if not is_record(path):
        return
    found = rerun(path)
    if as_json:
        text = json.dumps(found._asdict())
    elif found.different:
        text = f"{found.different} of {found.answers.total():,} answers differ: {found.first}"
    else:
        text = f"{found.answers.total():,} answers of the policy, all the same"
    sys.stdout.write(f"{text}\n")
    raise typer.Exit(int(found.different > 0))
