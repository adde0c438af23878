"""Attention: every kernel behind one signature, sequences split over devices."""
