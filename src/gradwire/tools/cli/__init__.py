"""The command line, which nothing else imports."""
