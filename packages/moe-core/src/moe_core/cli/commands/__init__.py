"""Commands of ``moe``: one module each, whose ``run(arguments)`` returns the exit code."""
