"""Recurrent and state-space layers: cells, scans along the sequence, Seq2Seq."""
