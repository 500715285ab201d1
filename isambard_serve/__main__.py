"""``python -m isambard_serve`` is the ``isambard-serve`` command."""

from isambard_serve.cli import main

if __name__ == "__main__":
    main()
