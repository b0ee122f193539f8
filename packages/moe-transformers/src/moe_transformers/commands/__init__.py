"""Commands ``moe generate`` and ``moe perplexity``: ``run(arguments)`` returns an exit code."""
