"""`tierkv advise`: what pays on a scenario, for people."""

from rich.console import Console
from rich.table import Table

from tierkv.simulation.advice import RUN_TOKENS, break_even, worth
from tierkv.simulation.scenario import read_scenario


def run(name: str, fidelity: str, position: int) -> int:
    """Print break-even rates and what each form earns in each tier; returns the exit status."""
    scenario = read_scenario(name)
    console = Console()
    even = Table(title=f"{name}: loading pays above")
    even.add_column("a run that starts at token", justify="right")
    even.add_column("raw GB/s", justify="right")
    for point in break_even(scenario):
        even.add_row(f"{point.position:,}", f"{point.raw_bps / 1e9:.2f}")
    console.print(even)
    forms = Table(title=f"{RUN_TOKENS:,} tokens from {position:,} on, class {fidelity}")
    forms.add_column("tier")
    forms.add_column("profile")
    for heading in (
        "load ms",
        "saves ms",
        "pays from tokens",
        "s saved by one more GiB, used once",
    ):
        forms.add_column(heading, justify="right")
    for one in worth(scenario, fidelity, position):
        forms.add_row(
            one.tier,
            one.form,
            f"{one.load_s * 1e3:.1f}",
            f"{one.saved_s * 1e3:+.1f}",
            "never" if one.least_tokens is None else f"{one.least_tokens:,}",
            f"{one.saved_s_per_gib:.2f}",
        )
    console.print(forms)
    return 0
