"""The paper as data and as code: what its public implementation really does, switch by switch."""
