from undertow.serving.cli import main

main()
