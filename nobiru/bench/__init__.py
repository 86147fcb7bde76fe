"""The load generator behind `nobiru bench`: it drives any server with OpenAI's interface and says how fast it was.

`workload` makes prompts and arrival times, `client` sends one request, `load` runs them all, `statistics` turns what
happened into numbers, `report` and `plot` show them. Knows nothing of the engine; a server is a URL.
"""
