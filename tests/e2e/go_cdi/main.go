// Injects one CDI device into an empty container with the interface's own library, as runtimes do, and prints the container's spec.
//
//	inject FOLDER DEVICE
package main

import (
	"encoding/json"
	"fmt"
	"os"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func main() {
	if err := inject(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func inject(folder, device string) error {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(folder), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	for path, errs := range cache.GetErrors() {
		return fmt.Errorf("%s: %v", path, errs)
	}
	spec := &oci.Spec{}
	if missing, err := cache.InjectDevices(spec, device); err != nil {
		return fmt.Errorf("%v: %w", missing, err)
	}
	return json.NewEncoder(os.Stdout).Encode(spec)
}
