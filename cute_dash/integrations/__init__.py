"""cute-dash inside other libraries, one module for each. None of them is a dependency: a module needs its library."""
