"""Run a module's `main` with Triton's tuner off: each kernel takes the first of its configurations.

    python kernels/benchmarks/untuned.py vllm.entrypoints.cli.main serve CHECKPOINT ...

Tuning the kernels of a KDA layer takes minutes for each head count, and two engines that chose differently round differently in that layer, which
is not what their answers are compared for. Engines that vLLM spawns import this script again, and with it the change.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from triton.runtime.autotuner import Autotuner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout


def take_first_configurations() -> None:
    """From now on, a kernel that is decorated with `triton.autotune` has one configuration, and nothing to tune."""
    made = Autotuner.__init__

    @functools.wraps(made)
    def with_one(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.configs = self.configs[:1]

    Autotuner.__init__ = with_one


take_first_configurations()

if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    module.main()
