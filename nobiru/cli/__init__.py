"""The `nobiru` command. Owns options, help texts and what is printed; everything it does is done by packages below."""
