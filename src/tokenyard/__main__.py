"""``python -m tokenyard``."""

from tokenyard.cli import main

if __name__ == "__main__":
    main()
