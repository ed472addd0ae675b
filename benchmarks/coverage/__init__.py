"""The comparison of coverage: its cells, its designs of given noise, and its tests."""
