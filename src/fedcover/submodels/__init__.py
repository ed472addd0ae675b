"""Cut models into sub-models: find units, slice or mask them, encode and count the parts."""
