"""`python -m advisor`: the same as the `advisor` command."""

from advisor.cli.main import main

if __name__ == "__main__":
    main()
