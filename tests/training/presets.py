"""Names of the presets as test parameters.

The default tier runs one preset for each structure of the gradient; the other presets are marked `long`.
"""

import pytest

from config.schema.policy import PRESETS

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
DEFAULT_TIER = {
    *("grpo", "gspo", "cispo", "sapo", "gmpo", "vespo", "luspo", "opsm", "kl_cov", "high_entropy"),
    *("opd", "echo", "gdpo", "adaptive_entropy", "compat_nanochat", "compat_torchrl", "compat_verl"),
}
EVERY_PRESET = [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.long, id=name) for name in NAMES]
