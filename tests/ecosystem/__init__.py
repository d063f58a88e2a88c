"""Tools of other projects, as their users call them; `make test-ecosystem` installs and runs them."""
