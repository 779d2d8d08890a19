"""One model on several processes: how it is cut, how its parts talk, how the processes are started and watched."""
