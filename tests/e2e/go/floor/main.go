// Command floor is the least that a device plugin can be: it offers the two
// resources of an eight-GPU node with the agent's own options and answers every
// call at once, with nothing. The time a kubelet needs with it is the floor that
// the agent is measured against.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var options = &api.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}

// plugin serves one resource.
type plugin struct {
	api.UnimplementedDevicePluginServer
	resource, endpoint string
	devices            []*api.Device
	delay              time.Duration
	lowest             bool
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return options, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) GetPreferredAllocation(
	_ context.Context, request *api.PreferredAllocationRequest,
) (*api.PreferredAllocationResponse, error) {
	response := &api.PreferredAllocationResponse{}
	for _, container := range request.ContainerRequests {
		if p.lowest {
			slices.Sort(container.AvailableDeviceIDs)
		}
		ids := prefer(container.MustIncludeDeviceIDs, container.AvailableDeviceIDs, int(container.AllocationSize))
		response.ContainerResponses = append(response.ContainerResponses,
			&api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// prefer returns the first size ids of must and then available.
func prefer(must, available []string, size int) []string {
	ids := make([]string, 0, size)
	seen := make(map[string]bool, size)
	for _, list := range [][]string{must, available} {
		for _, id := range list {
			if len(ids) == size {
				return ids
			}
			if !seen[id] {
				seen[id] = true
				ids = append(ids, id)
			}
		}
	}
	return ids
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	time.Sleep(p.delay)
	response := &api.AllocateResponse{}
	for range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{})
	}
	return response, nil
}

func (p *plugin) PreStartContainer(
	context.Context, *api.PreStartContainerRequest,
) (*api.PreStartContainerResponse, error) {
	return &api.PreStartContainerResponse{}, nil
}

// serve listens on the plugin's socket in folder; the caller stops the server.
func (p *plugin) serve(folder string) (*grpc.Server, error) {
	path := filepath.Join(folder, p.endpoint)
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go func() {
		if err := server.Serve(listener); err != nil {
			log.Printf("%s: %v", p.resource, err)
		}
	}()
	return server, nil
}

// register announces the plugin to the kubelet of folder.
func (p *plugin) register(folder string) error {
	connection, err := grpc.NewClient("unix://"+filepath.Join(folder, "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(deadline, &api.RegisterRequest{
		Version: api.Version, Endpoint: p.endpoint, ResourceName: p.resource, Options: options,
	})
	return err
}

func devices(kind string, gpus, each int) []*api.Device {
	list := make([]*api.Device, 0, gpus*each)
	for gpu := range gpus {
		for i := range each {
			list = append(list, &api.Device{ID: fmt.Sprintf("%s-%d-%d", kind, gpu, i), Health: api.Healthy})
		}
	}
	return list
}

// inode distinguishes one kubelet's socket from the next; 0 where there is none.
func inode(path string) uint64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// present reports whether every plugin's socket is still in folder.
func present(folder string, plugins []*plugin) bool {
	for _, p := range plugins {
		if _, err := os.Stat(filepath.Join(folder, p.endpoint)); err != nil {
			return false
		}
	}
	return true
}

// offer serves and registers every plugin.
func offer(folder string, plugins []*plugin) ([]*grpc.Server, error) {
	var servers []*grpc.Server
	for _, p := range plugins {
		server, err := p.serve(folder)
		if err != nil {
			return servers, err
		}
		servers = append(servers, server)
	}
	for _, p := range plugins {
		if err := p.register(folder); err != nil {
			return servers, err
		}
		log.Printf("registered %s: %d ids", p.resource, len(p.devices))
	}
	return servers, nil
}

func main() {
	folder := flag.String("folder", "/var/lib/kubelet/device-plugins", "the kubelet's device plugin folder")
	gpus := flag.Int("gpus", 8, "number of GPUs")
	blocks := flag.Int("blocks", 320, "memory blocks of each GPU")
	delay := flag.Duration("allocate-delay", 0, "time that each Allocate takes")
	lowest := flag.Bool("lowest", false, "prefer the lowest ids, as most plugins do, and not the first that the kubelet names")
	flag.Parse()
	plugins := []*plugin{
		{resource: "tencent.com/vcuda-core", endpoint: "floor-core.sock", devices: devices("core", *gpus, 100), delay: *delay, lowest: *lowest},
		{resource: "tencent.com/vcuda-memory", endpoint: "floor-memory.sock", devices: devices("memory", *gpus, *blocks), delay: *delay, lowest: *lowest},
	}
	done, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	kubelet := filepath.Join(*folder, "kubelet.sock")
	var servers []*grpc.Server
	var registered uint64
	for done.Err() == nil {
		current := inode(kubelet)
		if current != 0 && (current != registered || !present(*folder, plugins)) {
			for _, server := range servers {
				server.Stop()
			}
			var err error
			if servers, err = offer(*folder, plugins); err != nil {
				log.Print(err)
				registered = 0
			} else {
				registered = current
			}
		}
		select {
		case <-done.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	for _, server := range servers {
		server.Stop()
	}
}
