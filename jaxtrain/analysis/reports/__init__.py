"""HTML reports of plans and proofs: what the terminal shows, on a page that can be sent around."""
