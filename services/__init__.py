"""The programs: each is settings, app, servicer and files of its own subject."""
