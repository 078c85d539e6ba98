"""The measurements of `make gpu`."""
