"""What `benchmarks/elastic_soak.py` and `benchmarks/elastic_pauses.py` share."""
