"""Commands ``moe generate`` and ``moe perplexity``; ``run(arguments)`` returns the exit code."""
