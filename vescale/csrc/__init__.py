"""Optional C++ helpers. Every caller has a Python fallback that gives the same answer."""

from vescale.csrc._loader import dispatcher, helper_states, load, load_module, missing_helpers, step_marks

__all__ = ["dispatcher", "helper_states", "load", "load_module", "missing_helpers", "step_marks"]
