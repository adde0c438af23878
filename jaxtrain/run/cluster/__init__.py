"""Multi-host: detection of a run's processes, rendezvous, failure propagation."""
