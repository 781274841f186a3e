"""The command ``ringstrategy``: one file per subcommand, each with an ``add_parser`` that sets ``func``."""
