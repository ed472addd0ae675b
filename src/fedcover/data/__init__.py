"""The data that ships inside the package: see digits.LICENSE.md for where it comes from."""
