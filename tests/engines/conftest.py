"""What goes wrong in a test of a real vLLM is usually said in the engine's log."""

from collections.abc import Generator

import pytest

from tests.engines.vllm_engine import STARTED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and STARTED:
        report.sections.append(("end of vLLM's log", STARTED[-1].said()))
    return report
