"""The paper as data and as code: what its public implementation really does, as switches that can be turned one by one."""
