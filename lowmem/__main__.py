from lowmem.cli import main

raise SystemExit(main())
