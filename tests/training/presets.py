"""Names of the presets; in the default tier one for each structure of the gradient. Not a test file."""

import pytest

from config.schema.policy import PRESETS

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
SEVERAL = {
    *("grpo", "gspo", "cispo", "sapo", "gmpo", "vespo", "luspo", "opsm", "kl_cov", "high_entropy"),
    *("opd", "echo", "gdpo", "adaptive_entropy", "compat_nanochat", "compat_torchrl", "compat_verl"),
}
EVERY_PRESET = [
    pytest.param(name, marks=() if name in SEVERAL else pytest.mark.long, id=name) for name in NAMES
]
