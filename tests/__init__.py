"""The test suite; it mirrors the packages of vescale."""
