"""The `megatrain-ds` command: one module per subcommand, each imported only when it is run."""
