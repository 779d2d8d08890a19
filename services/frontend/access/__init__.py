"""Who may call, what each caller may use, and how much of it. Knows no protocol: gRPC and HTTP ask the same gate."""
