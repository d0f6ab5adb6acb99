"""Optional C++ helpers. Callers have Python fallbacks that give the same answer; only static mode needs the helpers."""

from vescale.csrc._loader import (
    dispatcher,
    helper_states,
    load,
    load_module,
    missing_helpers,
    rebuild_command,
    step_marks,
    tape,
)
