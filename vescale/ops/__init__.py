"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family."""

from vescale.ops._registry import OpEntry, OpFamily, aten, entries, entry_of, families, register, register_family

__all__ = ["OpEntry", "OpFamily", "aten", "entries", "entry_of", "families", "register", "register_family"]
