"""What a command of ``moe`` is, and those that other packages bring: below the grammar and the commands themselves."""
