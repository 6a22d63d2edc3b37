"""`python -m skipstone`: the command line, also under launchers such as accelerate's."""

from skipstone.cli import main

if __name__ == "__main__":
    main()
