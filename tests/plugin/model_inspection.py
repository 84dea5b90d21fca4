"""Models inspected in this process. vLLM does it in one of its own for each architecture, ten seconds and more of imports each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def inspect_in_process() -> Iterator[None]:
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield
