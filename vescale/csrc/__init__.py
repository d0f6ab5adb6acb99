"""Optional C++ helpers. Every caller has a Python fallback that gives the same answer, except static mode, which needs them."""

from vescale.csrc._loader import dispatcher, helper_states, load, load_module, missing_helpers, step_marks
from vescale.csrc._rebuild import rebuild_command

__all__ = ["dispatcher", "helper_states", "load", "load_module", "missing_helpers", "rebuild_command", "step_marks"]
