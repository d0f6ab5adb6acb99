"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family."""

from vescale.ops._registry import OpEntry, entries, entry_of, register

__all__ = ["OpEntry", "entries", "entry_of", "register"]
