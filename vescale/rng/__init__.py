"""Random numbers with single-device semantics: every rank draws its part of what one device would draw."""

__all__: list[str] = []
