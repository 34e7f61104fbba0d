"""Whole models around decode attention: weights from files, one decoder for a few families, the decode loop."""
